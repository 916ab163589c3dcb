"""Comparing a layout with one plain process: gradients and weights as boxes of logical tensors, routers' choices, errors."""
