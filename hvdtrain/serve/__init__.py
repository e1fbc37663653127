"""The web page that shows jobs, and its API. All data are read from the job folders."""
