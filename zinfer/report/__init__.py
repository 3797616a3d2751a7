"""Reports: records turned into a document to decide by, the answer first, then its evidence, failures included.

`findings` is the input; `summary`, `measured`, `predicted` and `contents` make sections of the blocks of `document`, in
the order of `contents`; `plot` draws the figures; `page` writes HTML, and `live` serves it. Equal results give equal
bytes::

    page.html(contents.document(findings))
"""
