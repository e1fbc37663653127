"""A job is a folder: what was asked for, how it goes, what its ranks said."""
