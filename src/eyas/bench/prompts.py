"""The built-in prompts by task: those of ``training.heldout``, and more of the kinds that serving meets.

They were written for this project, and no drafter of ours is trained on them. Changing one changes every number that
was measured with it: add rather than edit.
"""

from __future__ import annotations

from eyas.training.heldout import HELDOUT

PASSAGES = (
    "The ferry between Holm and the mainland runs on batteries since last autumn. It carries forty cars, takes eleven "
    "minutes for the crossing, and charges for seven minutes at either pier. In the first winter two crossings were "
    "cancelled because of ice, and none because of the batteries. Passengers mention the silence most of all: one can "
    "hear gulls on deck. The old diesel engine was given to a museum, where schoolchildren may start it on Sundays.",
    "A beekeeper in the Ardal valley noticed that her hives near the orchard gave less honey than those by the railway "
    "line. For three summers she weighed every frame. The embankment, never sprayed and mown only in October, held "
    "sixty kinds of flowers; the orchard bloomed for two weeks and then offered nothing. She wrote to the railway, "
    "which now mows later on ninety kilometres of track, and to the orchard, which planted clover between its rows.",
    "The town library of Merrow lends more than books. Behind the desk hang forty-two tools, six sewing machines, a "
    "telescope and a device that measures how much electricity a fridge uses. Each may be kept for ten days. Losses "
    "have been few: in four years one drill disappeared and came back by post, without a letter. The most borrowed "
    "object is a pasta machine, the least borrowed a set of juggling clubs that the librarian refuses to give away.",
    "When the glass factory closed in 1978, its furnace was left full. The melt cooled into a single block of eleven "
    "tonnes, green as a bottle and too heavy for the floor of any museum. It stayed where it was, the building around "
    "it became a concert hall, and the block now stands behind the stage. Musicians complain that it sings along at a "
    "low F. The acousticians have tried felt, sand and a wooden frame, and have meanwhile come to like it.",
    "Weather stations on mountain huts used to be read by hand, three times a day, by whoever lived there. The record "
    "of the Torren hut goes back to 1891 with a gap of nine days, when the keeper was snowed in at the village below. "
    "Comparing it with the automatic station that replaced him, researchers found him half a degree too warm on sunny "
    "afternoons: the shutter of his thermometer box had been painted brown by an earlier keeper who disliked white.",
    "The school in Oster starts at nine instead of eight since two years. Attendance in the first lesson rose from 88 "
    "to 95 percent, and the nurse hands out fewer headache tablets. Teachers were divided: some liked the quiet hour "
    "before, others missed free afternoons. Parents who begin work at eight asked for a breakfast club, which now has "
    "seventy members and its own newspaper. Marks in mathematics did not change, those in languages rose a little.",
    "A new kind of lock on the Lenne canal saves water by keeping it. Three basins at different heights take what "
    "flows out of the chamber and give it back for the next ship, so that only two fifths of a filling are lost. In "
    "dry summers this decides whether barges run at all. The gates are moved by the weight of water in a tank, with a "
    "motor only as a spare, and the keeper says that the spare has been used once, on a day when a film was shot.",
    "Otters returned to the river Sarn in 2009, by themselves. At first fish farmers lost up to a fifth of their "
    "trout. The county paid for fences and for a ranger who shows how to mend them, and today the loss is about two "
    "percent. What nobody expected was the effect on the banks: otters dig out the dens of an introduced rat that "
    "undermines dykes. The water board reckons that they save it the cost of one breach in every six years.",
    "The print shop of the Hald sisters still sets type by hand, for wedding cards and for one customer who publishes "
    "a poem each month and pays in cheese. The elder sister composes, the younger one runs a press built in 1923. They "
    "own 214 cases of letters and lack only a capital Q in one of them, for which they turn an O upside down and file "
    "a notch. An apprentice joined this spring; her first job was to sort a drawer that had been dropped in 1961.",
    "To find out how far pollen travels, a botanist placed sticky plates on the roofs of buses. Each plate stayed for "
    "one day on one route. Birch was everywhere, even on routes without a single birch; lime trees were caught only "
    "within two streets of their source. The bus company liked the idea and painted the plates yellow. Two passengers "
    "asked whether they were solar cells, and one driver reported that his bus had been visited by a swarm.",
    "The lighthouse at Skarn point was moved in one piece. The cliff had come within nine metres of its door, so the "
    "tower was cut from its base, lifted on forty jacks, and pushed along greased rails for sixty-three metres. It "
    "took eleven days, and a glass of water on the gallery was watched by camera and never spilled. By present rates "
    "of erosion the new place will be safe for about a hundred and forty years; the rails were left in the ground.",
    "In the village of Pell, rubbish is weighed. Every household has a card, the bins have scales, and a bill comes at "
    "the end of the year. Within two years the weight of rubbish fell by 45 percent. Some of it had moved to the "
    "woods, as critics had said it would, though less than feared: volunteers found eighty sacks in the first year and "
    "nine in the third. The money that was saved paid for a repair workshop, open on Thursdays, with soup.",
    "A clockmaker was asked to repair the town clock of Vaun, which gained four minutes a week in winter and lost two "
    "in summer. He found nothing wrong with it. The pendulum hung in the shaft where the bakery's chimney had been "
    "added in 1950, and the oven was off in the bakery's summer holidays. He did not touch the clock. He persuaded the "
    "baker to pay for twenty centimetres of cork, and now it is right to nine seconds a month.",
    "Divers mapping the bottom of Lake Idrun found a road. It runs for two kilometres at a depth of eighteen metres, "
    "paved with flat stones and lined by stumps of alder. The dating of the stumps says that they drowned about 3,200 "
    "years ago, when a landslide dammed the valley. Half-way along the road lies a cart with one wheel. Nothing was "
    "removed; the archaeologists left a numbered brass plate and asked the fishermen not to anchor there.",
    "A hospital in Brandt tried out quiet corridors. Trolleys got rubber wheels, alarms were sent to the nurses' "
    "pagers, and cleaning was moved from five in the morning to ten. Patients slept on average fifty minutes longer. "
    "Two alarms were answered later than before, neither with consequences, and the pagers were then made to repeat "
    "every twenty seconds. The most popular change was the cheapest: felt pads under the chairs of the night shift.",
    "The grain store at Ulm harbour was to be torn down when a colony of four hundred swifts was counted under its "
    "roof. Builders put up a tower with eight hundred boxes nearby and played the birds' calls from it for two "
    "springs. In the first year three pairs moved, in the second ninety. The store came down in the fourth year, in "
    "February, with nobody at home. Swifts now nest in six hundred of the boxes, and starlings in most of the others.",
    "Every June the women of Castro carry stones up the hill. Nobody agrees why. One story says that a tower was "
    "promised to a saint who had stopped a flood; another that the stones were to be thrown at tax collectors. There "
    "is a heap by now, seven metres high, which shows on sea charts as a landmark. A geologist looked at it and found "
    "stones from nine countries among the local ones, since women who have moved away send theirs by parcel.",
    "An engineer counted how often lifts in an office tower travelled empty: two trips in five. He let them wait on "
    "the floors where people were likely to call next, learned from the last fourteen days, instead of returning to "
    "the ground floor. The mean waiting time fell from 38 to 24 seconds and the use of electricity by a ninth. On the "
    "first day after a public holiday the lifts behaved oddly; they were expecting everybody to have breakfast.",
    "The choir of Lindholm rehearses in a disused cistern, where a sound takes nineteen seconds to fade. Fast music is "
    "impossible, so the conductor commissioned slow pieces, in which the echo of one chord is part of the next. "
    "Singers say that after a while one hears the room breathe. Recordings were tried and given up: on loudspeakers it "
    "is only noise. Concerts are held in coats, because the cistern has eight degrees in every season.",
    "A fishing village in the north pays its teenagers to talk. Each of them visits an old person once a week and "
    "writes down words for weather, ice, nets and knots. In three years they have collected 4,100 words, of which 700 "
    "stand in no dictionary. There are sixteen for kinds of slush. The linguist who leads the project says that the "
    "best result cannot be counted: grandchildren have started to use some of the words to annoy their parents.",
    "The tram line 4 in Porto Velho has grass between its rails. It was meant to look nice. Then the residents noticed "
    "that they could sleep with open windows, and measurements showed four decibels less. In summer the street is "
    "three degrees cooler than its neighbour. The grass is cut by a tram with a mower underneath, at night, and "
    "watered from the roofs of two stops. Its greatest enemies are taxis, for which the town has put up low stone "
    "balls.",
    "A potter in Inari fires her kiln with nothing but pine cones. They burn fast and hot, so six people feed the fire "
    "in turns for thirty hours. The ash melts on the pots into a glaze that ranges from honey to moss and cannot be "
    "planned. About one pot in seven cracks. She buries the broken ones in her garden path, and visitors who admire "
    "the path are told what it cost. School classes gather the cones and are paid in bowls.",
    "The bridge of Tarn was built for carts in 1764 and carries lorries today. Sensors glued to its arches report how "
    "much each of them gives: less than the thickness of a hair for a car, three hairs for a bus. Only once did an "
    "alarm ring, at four in the morning, with no traffic at all. A flood had carried a tree against the second pier. "
    "It was sawn up on the spot, and slices of it, with 212 rings, hang in the offices of those who were woken.",
    "In a valley with little sun, the people of Rjuk put a mirror on the mountain. It follows the sun and throws a "
    "patch of light as large as two tennis courts on the market square, from September to March. Benches stand where "
    "it falls. Opponents had called it a toy for the price of a kindergarten; the cafés alone now pay more in tax than "
    "it costs to run. On cloudy days a flag is raised, so that nobody walks to the square in vain.",
)

_QUESTIONS = (
    "How long does the ferry charge at either pier, and what do passengers mention most?",
    "Why did the hives by the railway give more honey, and what changed afterwards?",
    "Which object of the library is borrowed most often, and which least?",
    "What happened to the block of glass, and what do musicians complain of?",
    "Why was the keeper of the Torren hut half a degree too warm?",
    "What changed and what did not change when the school in Oster started later?",
    "How does the lock on the Lenne canal save water, and how much of a filling is lost?",
    "What good did the otters do that nobody expected?",
    "How do the Hald sisters make up for the missing letter?",
    "Which pollen was found everywhere, and which only near its source?",
    "How far was the lighthouse moved, and how was it done?",
    "How did the weight of rubbish in Pell change, and what was the money used for?",
    "Why was the town clock of Vaun wrong, and how was it put right?",
    "What did the divers find in Lake Idrun, and how old is it?",
    "Which changes did the hospital in Brandt make, and which one was the most popular?",
    "How were the swifts persuaded to move?",
    "Which explanations are there for the stones of Castro, and what did the geologist find?",
    "By how much did the waiting time for lifts fall, and when did they behave oddly?",
    "Why does the choir of Lindholm sing slow pieces, and why are concerts held in coats?",
    "How many words have the teenagers collected, and how many are in no dictionary?",
    "What does the grass between the rails of line 4 do for the street?",
    "What does the potter in Inari do with broken pots?",
    "When did the alarm of the bridge of Tarn ring, and what was the cause?",
    "When does the mirror of Rjuk light the square, and what is the flag for?",
)

_SUMMARIES = (
    "Summarise in one sentence:",
    "Summarise this for a busy reader, in at most forty words:",
    "Give the three most important points as a list:",
    "Write a headline and a summary of two sentences:",
    "Retell this in simple words for a child of eight:",
    "What is the main point, and which details support it?",
)

TRANSLATION = (
    "Translate into French: The swimming pool opens at seven, but the sauna only in the afternoon. Please bring a coin "
    "for the locker and leave your shoes at the door.",
    "Translate into German: We have checked your invoice and found two mistakes. The second item was ordered but never "
    "delivered, and the discount of five percent is missing.",
    "Translate into Spanish: My grandmother kept a list of everything she had ever lent to her neighbours. When she "
    "died, we found that she had crossed out every line.",
    "Translate into Italian: Take the road along the lake until you reach the chapel, then turn left. The house with "
    "the blue gate is ours; the dog is friendly.",
    "Translate into Portuguese: The meeting has been moved to Thursday at half past two. If you cannot come, please "
    "send your comments by Wednesday evening.",
    "Translate into Dutch: Rain is expected in the west, with strong winds along the coast. In the east it stays dry "
    "until the evening.",
    "Translate into Polish: She opened the envelope slowly, as if it might contain something alive. There was only a "
    "key, and a piece of paper with a number on it.",
    "Translate into Swedish: Before you start the machine, make sure that the lid is closed. Never reach inside while "
    "the red light is on.",
    "Translate into Japanese: Thank you for your patience. Your order left our warehouse this morning and should "
    "arrive on Friday.",
    "Translate into Chinese: The museum is closed on Mondays. Children under twelve do not pay, and students pay half.",
    "Translate into Russian: He had promised to be back before dark, and so he ran the last two miles through the "
    "snow.",
    "Translate into Turkish: Would you rather sit by the window or near the stove? The soup today is lentil with "
    "lemon.",
    "Translate into Greek: The old men in the harbour said that the wind would turn, and by noon it had.",
    "Translate into Danish: Please do not feed the ducks with bread. Oats and peas are better for them and for the "
    "pond.",
    "Translate into English: La boulangerie du coin ferme en août. On dit que le boulanger passe ses vacances à "
    "dormir, ce que tout le quartier comprend.",
    "Translate into English: Der Zug hält heute nicht in Altstadt. Reisende dorthin fahren bitte bis zum Hauptbahnhof "
    "und nehmen den Bus der Linie zwölf.",
    "Translate into English: El gato del vecino entra por la ventana cada noche, se come lo que encuentra y se va sin "
    "dar las gracias.",
    "Translate into English: La festa comincia alle nove, ma nessuno arriva prima delle dieci. Portate qualcosa da "
    "bere e una sedia.",
    "Translate into English: O rio subiu dois metros durante a noite, e de manhã os barcos estavam na praça.",
    "Translate into English: De sleutel ligt onder de bloempot, maar niet onder de eerste: die is voor de dieven.",
    "Translate into French and German, one after the other: The lift is out of order. Use the stairs on the left.",
    "Translate into Spanish, and keep the tone polite: I am afraid that we cannot accept your proposal in its present "
    "form, but we would be glad to talk about another one.",
    "Translate into Italian, and explain one difficult choice you made: A rolling stone gathers no moss.",
    "Translate into German, as a text message to a friend: Running late, start without me, save me a piece of cake!",
)

_LONG = 16  # passages in a long context: about 1,800 tokens


def _long_context(number: int) -> str:
    """A report of several passages, each beginning with another one, and a question about one in its middle."""
    passages = [PASSAGES[(number + offset) % len(PASSAGES)] for offset in range(_LONG)]
    question = _QUESTIONS[(number + _LONG // 2) % len(PASSAGES)]
    return "\n\n".join(["Read these notes, then answer the question at the end.", *passages, f"Question: {question}"])


BUILTIN: dict[str, tuple[str, ...]] = {
    **HELDOUT,
    "summarising": tuple(f"{_SUMMARIES[n % len(_SUMMARIES)]}\n\n{text}" for n, text in enumerate(PASSAGES)),
    "translation": TRANSLATION,
    "long": tuple(_long_context(number) for number in range(len(PASSAGES))),
}
