"""The web page of jobs and its API; all data are read from the folders of jobs."""
