"""Runs fake_cuda/dry_run.py, a training on a fake CUDA device, in this process; prints why where it cannot run."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from launcher.estimate.device import NoShim, open_device


def main() -> None:
    """Opens the fake device before anything imports torch, and starts the dry run."""
    try:
        open_device()
    except NoShim as error:
        print(json.dumps({"no_shim": str(error)}))
        return
    from fake_cuda.dry_run import main

    main(is_whole=sys.argv[1:] == ["--whole"])


if __name__ == "__main__":
    main()
