"""``hvdtrain migrate``: rewrites scripts that use Horovod."""
