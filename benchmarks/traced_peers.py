"""Estimates a micro-batch's time by tracing: Roundtable, eager and compiled, beside `transformers`' own eager models.

    python benchmarks/traced_peers.py [--gpu H200]

Prints one JSON line, which traced/peers.py explains.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from launcher.estimate.device import NoShim, open_device


def main() -> None:
    """Opens the fake CUDA device before anything imports torch, and traces."""
    try:
        open_device()
    except NoShim as error:
        raise SystemExit(f"no fake CUDA device: {error}") from None
    from traced.peers import main

    main()


if __name__ == "__main__":
    main()
