"""APIs of other libraries, such as Horovod, that are built on hvdtrain's collectives."""
