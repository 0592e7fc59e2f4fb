"""The image formats that Pillow itself decodes on this machine."""

from functools import cache

from PIL import Image, ImageFile

_NEVER_DECODED = {"EPS", "MPEG"}  # Ghostscript renders EPS; Pillow reads only the size of an MPEG file


@cache
def readable_formats() -> tuple[str, ...]:
    """Return the names of Pillow's formats that have a decoder, in the order in which Pillow tries them."""
    Image.init()
    readers = {name: Image.OPEN[name][0] for name in Image.ID if name in Image.OPEN and name not in _NEVER_DECODED}
    stub = ImageFile.StubImageFile
    return tuple(
        name for name, reader in readers.items() if not (isinstance(reader, type) and issubclass(reader, stub))
    )


def image_suffixes() -> frozenset[str]:
    """Return the suffixes, such as ".png", of the files that `load_image` reads.

    Some of Pillow's formats are excluded. Stubs (BUFR, GRIB, HDF5, WMF) need a handler from another package. EPS needs
    an external program for rendering. Pillow reads only the size of an MPEG file.
    """
    return frozenset(suffix for suffix, format in Image.registered_extensions().items() if format in readable_formats())
