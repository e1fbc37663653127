"""The comparison of hvdtrain with its peers: candidates, jobs and tables."""
