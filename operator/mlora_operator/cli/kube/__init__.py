"""The cluster, as commands see it.

``cluster`` tasks and pipelines: read, watched, applied
``choice``  which cluster, of all that the user has
``client``  requests to the API server, from the current kubectl context
``retry``   how long a command waits for a server that does not answer
"""
