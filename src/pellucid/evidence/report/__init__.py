"""Reports of studies: charts, tables and pages."""
