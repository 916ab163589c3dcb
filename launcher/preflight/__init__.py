"""`roundtable preflight`: which nodes are slow or broken, judged by what the others can do."""
