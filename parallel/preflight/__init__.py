"""The nodes before a run: what each GPU, each link and the shared disk can do, measured by the ranks themselves."""
