"""Reports: records turned into a document to decide by, the answer first, then its evidence, failures included.

`measured` and `contents` make sections of `measured.Findings`, of the blocks of `document`, in the order of `contents`;
`plot` draws the figures, and `live` serves the page. Equal results give equal bytes::

    document.html(contents.document(findings))
"""
