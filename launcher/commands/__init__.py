"""The commands of `roundtable`, one file for each."""
