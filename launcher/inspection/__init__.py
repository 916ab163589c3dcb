"""A forward pass of some texts looked into: attention, routers, and what each layer would predict."""
