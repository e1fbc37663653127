"""The command ``hvdtrain migrate``, which rewrites scripts that use Horovod."""
