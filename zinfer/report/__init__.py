"""Reports: records turned into a document to decide by, the answer first, then its evidence, failures included.

`findings` is the input; `measured`, `predicted`, `sizing` and `evidence` make sections of the blocks of `document`, in
the order of `contents`; `plot` draws the figures; `page` writes HTML and `markdown` its twin. Equal results give equal
bytes::

    page.html(contents.document(findings)), markdown.markdown(contents.document(findings))
"""
