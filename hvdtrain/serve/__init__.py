"""The web page and its API: reads the folders of jobs, and owns nothing."""
