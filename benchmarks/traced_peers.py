"""A micro-batch's time by the traced model: ours, eager and compiled, beside `transformers`' own eager models.

    python benchmarks/traced_peers.py [--gpu H200]

Prints one JSON line: see traced/peers.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from launcher.estimate.device import NoShim, open_device


def main() -> None:
    """Makes the device before anything imports torch, and traces."""
    try:
        open_device()
    except NoShim as error:
        raise SystemExit(f"no fake CUDA device: {error}") from None
    from traced.peers import main

    main()


if __name__ == "__main__":
    main()
