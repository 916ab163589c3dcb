"""What a step is made of: operations by part of the model, what each asks of a device, and the least time for it."""
