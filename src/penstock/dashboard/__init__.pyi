from .catalogue import Catalogue as Catalogue
from .server import serve_dashboard as serve_dashboard
from .static_page import write_static as write_static
