"""Commands on jobs: ``hvdtrain submit``, ``jobs``, ``show``, ``logs``, ``stop`` and the like."""
