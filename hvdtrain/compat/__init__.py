"""APIs of other libraries, on hvdtrain's collectives and reducer."""
