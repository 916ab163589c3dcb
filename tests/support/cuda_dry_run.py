"""A dry run of CUDA, in a process of its own: see fake_cuda/dry_run.py. Says why where there can be none."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from launcher.estimate.device import NoShim, open_device


def main() -> None:
    """Makes the device before anything imports torch, and runs."""
    try:
        open_device()
    except NoShim as error:
        print(json.dumps({"no_shim": str(error)}))
        return
    from fake_cuda.dry_run import main

    main(is_whole=sys.argv[1:] == ["--whole"])


if __name__ == "__main__":
    main()
