"""Checks of the nodes before a run: the speed of each GPU, each link and the shared disk, measured by the ranks."""
