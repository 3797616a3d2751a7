"""Records to a document somebody decides by: the answer first, then what it rests on, failures included.

`study` gathers what was measured, `measured` and `predicted` say it in sections of the blocks of `document`, `figure`
draws, `page` writes HTML and `markdown` its twin. Equal results give equal bytes::

    page.html(compose.document(findings)), markdown.markdown(compose.document(findings))
"""
