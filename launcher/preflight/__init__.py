"""`roundtable preflight`: finds slow or broken nodes by comparing each node with the others."""
