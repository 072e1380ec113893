"""The exchange of records with the files of other tools."""
