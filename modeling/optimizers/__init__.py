"""Update rules (optimizers), one file each."""
