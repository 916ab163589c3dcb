"""What is computed, on one device."""
