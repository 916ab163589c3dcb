"""The processes of a job: how they start, find each other, watch each other, stop and end."""
