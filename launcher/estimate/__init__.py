"""A step over fake CUDA tensors: what a GPU would be asked to do, without one."""
