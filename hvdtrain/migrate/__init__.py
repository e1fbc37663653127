"""Moving scripts that use Horovod over to hvdtrain; reads them, and runs none of them."""
