"""One operator acts at a time.

``elector`` who acts
``lease``   the object of the API server that says so
"""
