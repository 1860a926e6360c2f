"""calibrant inside other libraries: one module each, importing the library it is named after."""
