"""Comparing a layout with one plain process: gradients, weights, outputs and routers' choices, tensor by tensor."""
