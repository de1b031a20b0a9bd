"""What a task has made, on its way to a store.

``checkpoints``    states are taken, stored, found and pruned
``publisher``      a finished adapter in the background; ``publish``: joined, checked, uploaded
``retrier``        a store that refuses is asked again, with the keys of the newest plan
``fair_queue``     which store's uploads go next, so that a store that never answers holds up nobody
``store_identity`` which addresses are one store
``timer``          calls that are made after a while
"""
