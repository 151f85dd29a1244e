"""What self-made prompts may be about. None of it is taken from a benchmark."""


def _parts(text: str) -> tuple[str, ...]:
    return tuple(text.strip().replace("\n", "|").split("|"))


TOPICS = _parts(
    """
photosynthesis|black holes|the water cycle|plate tectonics|antibiotics|vaccines|the immune system|DNA|evolution|gravity
electricity|magnets|rainbows|lightning|volcanoes|earthquakes|tides|the moon|solar eclipses|comets|the Big Bang|atoms
chemical bonds|acids and bases|the periodic table|enzymes|viruses|bacteria|fungi|coral reefs|whale migration|bees
spiders|octopuses|wolves|elephants|penguins|bats|dinosaurs|falcons|house cats|dog training|horse riding|aquariums
rainforests|deserts|glaciers|wetlands|climate change|recycling|composting|solar panels|wind turbines|nuclear power
batteries|electric cars|bicycles|trains|airplanes|rockets|bridges|skyscrapers|tunnels|ships|submarines|canals
the Roman Empire|ancient Egypt|the Silk Road|the Vikings|the Renaissance|the French Revolution|the printing press
the Industrial Revolution|the First World War|the Cold War|the Ottoman Empire|the Inca civilisation|feudal Japan
the Black Death|the space race|women's suffrage|the Berlin Wall|the Great Depression|democracy|constitutions|taxes
elections|human rights|the United Nations|courts and judges|copyright|privacy|free speech|police reform|immigration
supply and demand|inflation|interest rates|stock markets|insurance|mortgages|personal budgeting|credit scores
startups|marketing|customer service|negotiation|leadership|remote work|job interviews|writing a CV|time management
project planning|public speaking|teamwork|burnout|mindfulness|sleep|nutrition|vitamins|running a marathon|yoga
weight training|swimming|back pain|headaches|allergies|diabetes|blood pressure|first aid|dental care|skin care
parenting|teenagers|friendship|grief|loneliness|jealousy|confidence|procrastination|habits|happiness|forgiveness
bread baking|sourdough|pasta|curry|sushi|tacos|pancakes|chocolate|coffee|tea|cheese|wine|olive oil|spices|knife skills
gardening|tomatoes|roses|houseplants|lawn care|beekeeping|fishing|hiking|camping|rock climbing|sailing|surfing|skiing
football|basketball|cricket|tennis|chess|poker|board games|video games|puzzles|magic tricks|origami|knitting|pottery
woodworking|painting|watercolours|photography|film making|theatre|ballet|opera|jazz|classical music|hip hop|guitars
the piano|songwriting|poetry|novels|fairy tales|myths|science fiction|detective stories|comics|museums|architecture
fashion|shoes|jewellery|perfume|interior design|moving house|cleaning|laundry|plumbing|home repairs|smart homes
smartphones|laptops|passwords|e-mail|social media|online shopping|search engines|encryption|computer viruses|backups
machine learning|neural networks|chatbots|self-driving cars|robots|drones|3D printing|virtual reality|blockchain
open source software|databases|operating systems|web browsers|cloud computing|computer networks|programming languages
unit testing|version control|debugging|algorithms|data structures|spreadsheets|statistics|probability|geometry|algebra
calculus|prime numbers|infinity|logic puzzles|optical illusions|memory|language learning|grammar|etymology|handwriting
sign language|translation|libraries|schools|homework|exams|university life|scholarships|teaching|kindergarten|history
geography|maps|time zones|calendars|holidays|weddings|birthdays|gifts|travel on a budget|Paris|Tokyo|Kenya|Brazil
Iceland|India|New Zealand|Mexico|the Alps|the Sahara|the Amazon|islands|beaches|hotels|passports|packing a suitcase
road trips|public transport|traffic jams|pets|zoos|circuses|farming|forestry|mining|oceans|weather forecasts|snow
hurricanes|drought|famine|charity|volunteering|philosophy|ethics|free will|stoicism|Buddhism|superstitions|dreams
ghosts|pirates|knights|dragons|time travel|aliens|utopias|the future of work|the meaning of life|humour|kindness
"""
)

PROGRAMS = _parts(
    """
reverses a linked list|checks whether a string is a palindrome|counts the words in a file
zips two lists into a dictionary|finds the longest common prefix|computes a moving average
finds what two lists have in common|validates an e-mail address|parses a date|spells out a number in words
sorts people by age|counts words by their length|pads a list to a given length|finds the shortest path in a graph
implements a ring buffer|implements a queue with two stacks|implements an LRU cache|searches a sorted array
transposes a matrix|multiplies two matrices|rotates an array|computes factorials|lists the divisors of a number
finds the least common multiple|converts between bases|encrypts text with a shift|compresses a string by run lengths
checks a credit card number|evaluates an arithmetic expression|reads a configuration file|writes JSON to a file
downloads a web page|retries a failing call|measures how long something takes|logs errors|prints a triangle of stars
plays tic-tac-toe|simulates dice|shuffles a deck of cards|solves a sudoku|draws a maze|converts temperatures
calculates compound interest|formats a phone number|generates a password|counts vowels|finds the most common word
splits a list into chunks|checks whether a year is a leap year|swaps two variables|finds the median
computes the standard deviation|normalises a vector|builds a binary search tree|walks a directory
finds missing numbers|finds large files|sends an e-mail|paginates results|caches results|limits the rate of calls
prints a progress bar|manages a to-do list|tracks an inventory|models a parking garage|schedules tasks
"""
)

CODE = (*("Python",) * 6, "JavaScript", "Java", "C", "C++", "Rust", "Go", "TypeScript", "SQL", "Bash", "Ruby", "C#")
TONGUES = ("French", "Spanish", "German", "Italian", "Portuguese", "Dutch", "Polish", "Swedish", "Latin", "English")
COUNTRIES = _parts(
    "Norway|Peru|Egypt|Japan|Canada|Greece|Chile|Turkey|Vietnam|Morocco|Poland|Australia|Ethiopia|Cuba|Ireland|Nepal"
    "|South Korea|Argentina|Nigeria|Finland|Iran|Portugal|Thailand|Ukraine|Colombia|Hungary|Indonesia|Jordan"
)
NAMES = _parts(
    "Amira|Ben|Chloe|Diego|Elena|Farid|Grace|Hiro|Ines|Jonas|Keiko|Liam|Maya|Noah|Olga|Priya|Quinn|Rosa|Samir|Tara"
    "|Umar|Vera|Wendy|Yusuf|Zoe"
)
THINGS = _parts(
    "apples|pencils|marbles|stickers|coins|books|tickets|cookies|eggs|balloons|stamps|bottles|chairs|flowers|cards"
    "|candles|oranges|bricks|toy cars|notebooks|muffins|seashells|T-shirts|buttons|batteries|plates"
)
ROLES = _parts(
    "a pirate captain|a medieval knight|a friendly robot|a strict librarian|a travel guide|a doctor|a detective"
    "|a football coach|an astronaut|a chef|a wise old tree|a news reporter|a history teacher|a software engineer"
    "|a job interviewer|a customer who wants a refund|a shopkeeper|a poet|a lawyer|a talking cat|a fitness trainer"
    "|a farmer|an alien visitor|a museum guide|a bank clerk|a grandmother|a comedian|a philosopher"
)

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "You are an expert programmer. Give working code with short explanations.",
    "You are a patient maths tutor. Think step by step and state the result at the end.",
    "You are a friendly teacher who explains things to children.",
    "You are a careful writer. Answer in well-formed paragraphs.",
    "You are a translator. Reply with the translation only.",
    "You answer in at most two sentences.",
    "You are a knowledgeable and honest AI. If you are not sure, say so.",
    "Answer with bullet points where it helps.",
    "You are a creative storyteller.",
    "You are an assistant for customers of an online shop. Be polite and concise.",
)
