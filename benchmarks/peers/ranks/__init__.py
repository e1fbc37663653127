"""Programs of the ranks; ``measure`` of each module returns the results on rank 0.

Each runs in the environment of its library, and imports the library when it is called.
"""
