"""Jobs that run in pods: their objects, made of what was asked for; and what runs in the pods."""
