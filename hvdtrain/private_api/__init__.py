"""All that hvdtrain uses of other packages and that is not their public API, a module for each."""
