"""The two resources, their conditions and their CRDs. Pure: pydantic only; everything else may import this."""

GROUP = "mlora.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
