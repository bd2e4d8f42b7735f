"""Reports of studies: `charts` draws each chart once, `page` writes the HTML page around them."""
