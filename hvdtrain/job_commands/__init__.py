"""Commands for jobs, such as ``hvdtrain submit``, ``jobs``, ``show``, ``logs`` and ``stop``."""
