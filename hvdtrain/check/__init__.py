"""``hvdtrain check``: is this cluster fit to train?"""
