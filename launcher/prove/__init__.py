"""`roundtable prove`: a layout, shrunk, against one plain process."""
