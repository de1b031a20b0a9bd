"""The operator without a cluster: files for the API server, local processes for the pods.

``documents``  YAML as kubectl reads it, with line numbers
``manifests``  the user's files as tasks, pipelines and Secrets, or as a list of problems
"""
