"""Pipeline parallelism: which layers a stage holds, in which order micro-batches pass, and how they are run."""
