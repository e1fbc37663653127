"""What ranks do: a module for each program, whose ``measure`` gives the first rank's findings.

Each runs in the environment of the library that it measures, so that they import it when called.
"""
