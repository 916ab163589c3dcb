"""Inspection of a forward pass over some texts: attention weights, routers' choices, and a logit lens."""
