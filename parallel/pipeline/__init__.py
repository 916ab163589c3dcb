"""Pipeline parallelism: the layers of each stage, the order in which micro-batches pass, and the code to run them."""
