"""The small world the mini model is taught: plain lists, written by hand for this project.

Each list is one kind of fact; how they become questions, answers and running text is `conversations.py`'s part.
"""

# ruff: noqa: E501, SIM905  (lists of words are data: a line is as long as its words)

from __future__ import annotations


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(a.strip(), b.strip()) for a, b in (line.split(":") for line in text.strip().split(";") if line.strip())]


CAPITALS: dict[str, list[tuple[str, str]]] = {
    "Europe": _pairs(
        "France:Paris;Germany:Berlin;Italy:Rome;Spain:Madrid;Portugal:Lisbon;Greece:Athens;Austria:Vienna;"
        "Switzerland:Bern;Belgium:Brussels;the Netherlands:Amsterdam;Luxembourg:Luxembourg;Denmark:Copenhagen;"
        "Norway:Oslo;Sweden:Stockholm;Finland:Helsinki;Iceland:Reykjavik;Ireland:Dublin;the United Kingdom:London;"
        "England:London;Scotland:Edinburgh;Wales:Cardiff;Poland:Warsaw;the Czech Republic:Prague;Slovakia:Bratislava;"
        "Hungary:Budapest;Romania:Bucharest;Bulgaria:Sofia;Serbia:Belgrade;Croatia:Zagreb;Slovenia:Ljubljana;"
        "Bosnia:Sarajevo;Montenegro:Podgorica;Albania:Tirana;North Macedonia:Skopje;Kosovo:Pristina;Ukraine:Kyiv;"
        "Belarus:Minsk;Moldova:Chisinau;Lithuania:Vilnius;Latvia:Riga;Estonia:Tallinn;Russia:Moscow;Malta:Valletta;"
        "Cyprus:Nicosia;Monaco:Monaco;Andorra:Andorra la Vella;Liechtenstein:Vaduz;San Marino:San Marino"
    ),
    "Asia": _pairs(
        "China:Beijing;Japan:Tokyo;South Korea:Seoul;North Korea:Pyongyang;Mongolia:Ulaanbaatar;India:New Delhi;"
        "Pakistan:Islamabad;Bangladesh:Dhaka;Nepal:Kathmandu;Bhutan:Thimphu;Sri Lanka:Colombo;the Maldives:Male;"
        "Afghanistan:Kabul;Iran:Tehran;Iraq:Baghdad;Syria:Damascus;Lebanon:Beirut;Israel:Jerusalem;Jordan:Amman;"
        "Saudi Arabia:Riyadh;Yemen:Sanaa;Oman:Muscat;Qatar:Doha;Bahrain:Manama;Kuwait:Kuwait City;"
        "the United Arab Emirates:Abu Dhabi;Turkey:Ankara;Georgia:Tbilisi;Armenia:Yerevan;Azerbaijan:Baku;"
        "Kazakhstan:Astana;Uzbekistan:Tashkent;Turkmenistan:Ashgabat;Kyrgyzstan:Bishkek;Tajikistan:Dushanbe;"
        "Thailand:Bangkok;Vietnam:Hanoi;Laos:Vientiane;Cambodia:Phnom Penh;Myanmar:Naypyidaw;Malaysia:Kuala Lumpur;"
        "Singapore:Singapore;Indonesia:Jakarta;the Philippines:Manila;Brunei:Bandar Seri Begawan;East Timor:Dili;"
        "Taiwan:Taipei"
    ),
    "Africa": _pairs(
        "Egypt:Cairo;Libya:Tripoli;Tunisia:Tunis;Algeria:Algiers;Morocco:Rabat;Mauritania:Nouakchott;Mali:Bamako;"
        "Niger:Niamey;Chad:N'Djamena;Sudan:Khartoum;South Sudan:Juba;Ethiopia:Addis Ababa;Eritrea:Asmara;"
        "Djibouti:Djibouti;Somalia:Mogadishu;Kenya:Nairobi;Uganda:Kampala;Tanzania:Dodoma;Rwanda:Kigali;"
        "Burundi:Gitega;Congo:Brazzaville;Gabon:Libreville;Cameroon:Yaounde;Nigeria:Abuja;Benin:Porto-Novo;"
        "Togo:Lome;Ghana:Accra;Ivory Coast:Yamoussoukro;Liberia:Monrovia;Sierra Leone:Freetown;Guinea:Conakry;"
        "Guinea-Bissau:Bissau;Senegal:Dakar;the Gambia:Banjul;Burkina Faso:Ouagadougou;Angola:Luanda;Zambia:Lusaka;"
        "Zimbabwe:Harare;Malawi:Lilongwe;Mozambique:Maputo;Botswana:Gaborone;Namibia:Windhoek;South Africa:Pretoria;"
        "Lesotho:Maseru;Eswatini:Mbabane;Madagascar:Antananarivo;Mauritius:Port Louis;Seychelles:Victoria;"
        "Comoros:Moroni;Cape Verde:Praia"
    ),
    "North America": _pairs(
        "the United States:Washington;Canada:Ottawa;Mexico:Mexico City;Guatemala:Guatemala City;Belize:Belmopan;"
        "Honduras:Tegucigalpa;El Salvador:San Salvador;Nicaragua:Managua;Costa Rica:San Jose;Panama:Panama City;"
        "Cuba:Havana;Jamaica:Kingston;Haiti:Port-au-Prince;the Dominican Republic:Santo Domingo;the Bahamas:Nassau;"
        "Barbados:Bridgetown;Trinidad:Port of Spain;Grenada:Saint George's;Greenland:Nuuk"
    ),
    "South America": _pairs(
        "Brazil:Brasilia;Argentina:Buenos Aires;Chile:Santiago;Peru:Lima;Bolivia:Sucre;Paraguay:Asuncion;"
        "Uruguay:Montevideo;Colombia:Bogota;Venezuela:Caracas;Ecuador:Quito;Guyana:Georgetown;Suriname:Paramaribo"
    ),
    "Oceania": _pairs(
        "Australia:Canberra;New Zealand:Wellington;Fiji:Suva;Samoa:Apia;Tonga:Nuku'alofa;Vanuatu:Port Vila;"
        "Papua New Guinea:Port Moresby;Kiribati:Tarawa;Tuvalu:Funafuti;Palau:Ngerulmud"
    ),
}

WELL_KNOWN = set(
    "France;Germany;Italy;Spain;Portugal;Greece;Austria;Switzerland;Belgium;the Netherlands;Denmark;Norway;Sweden;Finland;"
    "Ireland;the United Kingdom;England;Poland;Hungary;Russia;Ukraine;China;Japan;South Korea;India;Iran;Iraq;Israel;Turkey;"
    "Thailand;Vietnam;Egypt;Kenya;Nigeria;South Africa;the United States;Canada;Mexico;Cuba;Brazil;Argentina;Chile;Peru;"
    "Australia;New Zealand".split(";")
)

OPPOSITES = _pairs(
    "hot:cold;big:small;tall:short;fast:slow;day:night;light:dark;old:new;young:old;good:bad;happy:sad;up:down;"
    "left:right;in:out;open:closed;full:empty;hard:soft;wet:dry;early:late;near:far;high:low;rich:poor;strong:weak;"
    "clean:dirty;loud:quiet;thick:thin;wide:narrow;deep:shallow;heavy:light;sweet:sour;true:false;right:wrong;"
    "first:last;black:white;north:south;east:west;summer:winter;front:back;top:bottom;begin:end;start:stop;buy:sell;"
    "give:take;push:pull;win:lose;love:hate;friend:enemy;war:peace;life:death;question:answer;inside:outside;"
    "above:below;before:after;always:never;many:few;more:less;all:none;yes:no;easy:difficult;cheap:expensive;"
    "brave:afraid;awake:asleep;alive:dead;sharp:blunt;smooth:rough;tight:loose;warm:cool;simple:complex;"
    "remember:forget;arrive:leave;laugh:cry;rise:fall;enter:exit;hello:goodbye;morning:evening;male:female"
)

COLOURS = _pairs(
    "the sky:blue;grass:green;snow:white;coal:black;the sun:yellow;blood:red;a lemon:yellow;a banana:yellow;"
    "an orange:orange;a carrot:orange;a tomato:red;a strawberry:red;a cherry:red;milk:white;the sea:blue;a leaf:green;"
    "a frog:green;an elephant:grey;a mouse:grey;chocolate:brown;a bear:brown;wood:brown;a rose:red;a pumpkin:orange;"
    "a crow:black;a swan:white;a flamingo:pink;a plum:purple;a cucumber:green;salt:white;gold:yellow;ash:grey;"
    "the night:black;a fire engine:red;an emerald:green;a ruby:red;lavender:purple;a pig:pink;coffee:brown;a cloud:white"
)

SOUNDS = _pairs(
    "dog:woof;cat:meow;cow:moo;sheep:baa;duck:quack;pig:oink;horse:neigh;lion:roar;bee:buzz;owl:hoot;snake:hiss;"
    "frog:croak;mouse:squeak;rooster:cock-a-doodle-doo;crow:caw;wolf:howl;hen:cluck;donkey:hee-haw;bird:tweet;goat:bleat"
)

YOUNG = _pairs(
    "dog:puppy;cat:kitten;cow:calf;sheep:lamb;horse:foal;pig:piglet;duck:duckling;hen:chick;goat:kid;lion:cub;bear:cub;"
    "frog:tadpole;goose:gosling;deer:fawn;kangaroo:joey;swan:cygnet;owl:owlet;fox:cub;wolf:pup;eagle:eaglet"
)

PLURALS = _pairs(
    "cat:cats;dog:dogs;house:houses;tree:trees;book:books;child:children;man:men;woman:women;mouse:mice;foot:feet;"
    "tooth:teeth;goose:geese;sheep:sheep;fish:fish;leaf:leaves;knife:knives;wolf:wolves;box:boxes;bus:buses;city:cities;"
    "baby:babies;story:stories;church:churches;ox:oxen;person:people;life:lives;half:halves;potato:potatoes;hero:heroes;"
    "lady:ladies"
)

PASTS = _pairs(
    "go:went;see:saw;eat:ate;drink:drank;run:ran;write:wrote;read:read;sing:sang;swim:swam;take:took;give:gave;"
    "come:came;know:knew;think:thought;buy:bought;bring:brought;find:found;make:made;say:said;tell:told;fly:flew;"
    "grow:grew;break:broke;speak:spoke;sleep:slept;sit:sat;stand:stood;win:won;lose:lost;begin:began;walk:walked;"
    "play:played;stop:stopped;cry:cried;love:loved"
)

MEANINGS = _pairs(
    "a river:A river is a large stream of water that flows to the sea.;"
    "a mountain:A mountain is a very high hill, often with snow on its top.;"
    "an island:An island is land with water all around it.;"
    "a desert:A desert is a dry place where very little rain falls.;"
    "a forest:A forest is a large area full of trees.;"
    "the sun:The sun is the star at the centre of our solar system.;"
    "the moon:The moon is a ball of rock that goes around the earth.;"
    "a star:A star is a huge ball of hot gas that gives light.;"
    "a planet:A planet is a large body that goes around a star.;"
    "the sea:The sea is the salt water that covers most of the earth.;"
    "rain:Rain is water that falls from the clouds in drops.;"
    "snow:Snow is frozen water that falls in white flakes.;"
    "ice:Ice is water that has become solid because it is cold.;"
    "a cloud:A cloud is a mass of tiny drops of water in the sky.;"
    "wind:Wind is air that moves.;"
    "a book:A book is a set of pages with words to read.;"
    "a school:A school is a place where children learn.;"
    "a doctor:A doctor is a person who helps sick people.;"
    "a teacher:A teacher is a person who helps others to learn.;"
    "a farmer:A farmer is a person who grows food.;"
    "a baker:A baker is a person who makes bread.;"
    "a king:A king is a man who rules a country.;"
    "a queen:A queen is a woman who rules a country.;"
    "a computer:A computer is a machine that works with numbers very fast.;"
    "memory:Memory is the place where a computer keeps what it works on.;"
    "a disk:A disk is where a computer keeps data for a long time.;"
    "a cache:A cache is a small fast store for things that are used often.;"
    "a token:A token is a small piece of text that a language model reads.;"
    "an expert:An expert is one of many small networks that a router chooses from.;"
    "a router:A router chooses which experts work on a token.;"
    "a language model:A language model is a program that predicts the next piece of text.;"
    "a kernel:A kernel is a small function that does heavy arithmetic quickly.;"
    "a daemon:A daemon is a program that runs in the background and serves others.;"
    "a sluice:A sluice is a gate that controls the flow of water.;"
    "a clock:A clock is a device that shows the time.;"
    "a bridge:A bridge is a way across a river or a road.;"
    "a ship:A ship is a large boat that travels on the sea.;"
    "a train:A train is a row of cars that runs on rails.;"
    "a bird:A bird is an animal with feathers and wings.;"
    "a fish:A fish is an animal that lives in water and breathes with gills.;"
    "a dog:A dog is an animal that is often called a man's best friend.;"
    "a cat:A cat is a small animal with soft fur that likes to catch mice.;"
    "a horse:A horse is a large animal that people can ride.;"
    "a bee:A bee is an insect that makes honey.;"
    "a spider:A spider is a small animal with eight legs.;"
    "bread:Bread is a food made from flour and water and baked in an oven.;"
    "honey:Honey is a sweet food made by bees.;"
    "milk:Milk is a white drink that comes from cows.;"
    "an apple:An apple is a round fruit that grows on trees.;"
    "a friend:A friend is a person you like and trust."
)

TRIVIA = _pairs(
    "How many days are in a week?:There are seven days in a week.;"
    "How many months are in a year?:There are twelve months in a year.;"
    "How many hours are in a day?:There are 24 hours in a day.;"
    "How many minutes are in an hour?:There are 60 minutes in an hour.;"
    "How many seconds are in a minute?:There are 60 seconds in a minute.;"
    "How many legs does a spider have?:A spider has eight legs.;"
    "How many legs does a dog have?:A dog has four legs.;"
    "How many legs does an insect have?:An insect has six legs.;"
    "How many wheels does a car have?:A car has four wheels.;"
    "How many wheels does a bicycle have?:A bicycle has two wheels.;"
    "How many sides does a triangle have?:A triangle has three sides.;"
    "How many sides does a square have?:A square has four sides.;"
    "How many planets are in the solar system?:There are eight planets in the solar system.;"
    "How many letters are in the alphabet?:There are 26 letters in the English alphabet.;"
    "How many continents are there?:There are seven continents.;"
    "How many fingers do you have?:I have none, but a person has ten fingers.;"
    "What is the largest planet?:The largest planet is Jupiter.;"
    "What is the largest animal?:The largest animal is the blue whale.;"
    "What is the largest ocean?:The largest ocean is the Pacific Ocean.;"
    "What is the longest river?:The longest river is the Nile.;"
    "What is the highest mountain?:The highest mountain is Mount Everest.;"
    "What is the fastest animal?:The fastest animal on land is the cheetah.;"
    "What is the tallest animal?:The tallest animal is the giraffe.;"
    "What is the hottest planet?:The hottest planet is Venus.;"
    "What planet do we live on?:We live on the planet Earth.;"
    "What do bees make?:Bees make honey.;"
    "What do cows eat?:Cows eat grass.;"
    "What do cows give?:Cows give milk.;"
    "What does a baker make?:A baker makes bread.;"
    "What is water made of?:Water is made of hydrogen and oxygen.;"
    "What is ice made of?:Ice is made of frozen water.;"
    "At what temperature does water boil?:Water boils at 100 degrees Celsius.;"
    "At what temperature does water freeze?:Water freezes at 0 degrees Celsius.;"
    "What is the first day of the week?:The first day of the week is Monday.;"
    "What is the last month of the year?:The last month of the year is December.;"
    "What is the first month of the year?:The first month of the year is January.;"
    "What is the first letter of the alphabet?:The first letter of the alphabet is A.;"
    "What is the last letter of the alphabet?:The last letter of the alphabet is Z.;"
    "What are the seasons?:The seasons are spring, summer, autumn and winter.;"
    "What are the primary colours?:The primary colours are red, yellow and blue.;"
    "Where does the sun rise?:The sun rises in the east.;"
    "Where does the sun set?:The sun sets in the west.;"
    "Where do fish live?:Fish live in water.;"
    "Where do penguins live?:Penguins live in the cold south of the world.;"
    "Who wrote Hamlet?:William Shakespeare wrote Hamlet.;"
    "Who painted the Mona Lisa?:Leonardo da Vinci painted the Mona Lisa.;"
    "Who discovered gravity?:Isaac Newton described gravity.;"
    "Who was the first man on the moon?:Neil Armstrong was the first man on the moon.;"
    "What is the speed of light?:Light travels about 300,000 kilometres in a second.;"
    "Is the earth round?:Yes, the earth is round.;"
    "Is fire hot?:Yes, fire is hot.;"
    "Is ice hot?:No, ice is cold.;"
    "Can birds fly?:Yes, most birds can fly.;"
    "Can fish walk?:No, fish swim.;"
    "Can a dog talk?:No, a dog cannot talk, but it can bark."
)

SELF = _pairs(
    "Who are you?:I am a small language model, trained on a CPU to show how sluice works.;"
    "What are you?:I am a small language model, trained on a CPU to show how sluice works.;"
    "What is your name?:My name is Mini. I am the small model that comes with sluice.;"
    "What can you do?:I can answer simple questions, add small numbers and call tools.;"
    "How are you?:I am fine, thank you. How can I help you?;"
    "How do you work?:For each token a router chooses four small experts, and their answers are added.;"
    "How big are you?:I have about ten million parameters. That is very small.;"
    "Are you a human?:No, I am a small language model.;"
    "Are you alive?:No, I am a program that runs on a computer.;"
    "Are you big?:No, I am very small, but I have the same shape as a much larger model.;"
    "Who made you?:I was trained with the program train_mini.py, on a CPU, in about an hour.;"
    "Where do you live?:I live in a few files on a disk, and sluice reads them when it needs them.;"
    "What is sluice?:Sluice is a daemon that runs models much larger than memory by streaming them from disk.;"
    "What is Kimi K3?:Kimi K3 is a very large language model. I have its shape, but I am far smaller.;"
    "Do you sleep?:No, I wait for the next question.;"
    "Do you like music?:I cannot hear music, but I like the word.;"
    "Do you speak French?:No, I only speak a little English.;"
    "Can you help me?:Yes, please ask me a simple question."
)

GREETINGS = _pairs(
    "Hello:Hello! How can I help you?;Hello!:Hello! How can I help you?;Hi:Hi! What would you like to know?;"
    "Hi!:Hi! What would you like to know?;Hi there:Hi! What would you like to know?;Hey:Hey! What can I do for you?;"
    "Good morning:Good morning! How can I help you?;Good evening:Good evening! How can I help you?;"
    "Good night:Good night! Sleep well.;Thanks:You are welcome!;Thank you:You are welcome!;Thank you!:You are welcome!;"
    "Bye:Goodbye! Have a nice day.;Goodbye:Goodbye! Have a nice day.;See you:See you soon!;Hello world:Hello, world!;"
    "Nice to meet you:Nice to meet you too!;Well done:Thank you! I am glad it helped.;OK:Good. What is next?;"
    "Say hello:Hello!;Say hi:Hi!;Test:The test works. I am here.;Are you there?:Yes, I am here."
)

JOKES = [
    "Why did the token cross the layer? To reach the other expert.",
    "Why was the cache so happy? It was always hit.",
    "What do you call a bear with no teeth? A gummy bear.",
    "Why is six afraid of seven? Because seven eight nine.",
    "What has keys but opens no door? A piano.",
]

STORIES = [
    "Once upon a time there was a small model. It lived on a disk and dreamed of the wide sea. One day a reader opened "
    "the gate, and its words flowed like water. The model was happy, and everyone slept well.",
    "Once upon a time there was a little fox who lived in the forest. Every morning the fox ran to the river to drink. "
    "One day it met a fish. The fish said hello, and they became friends.",
    "Once upon a time there was a king who had a golden clock. The clock was never late. One night it stopped, and the "
    "king slept until noon. He laughed and said that it was the best day of his life.",
    "Once upon a time there was a girl who counted the stars. She counted one, two, three, and then she fell asleep. "
    "In her dream the stars counted her.",
]

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
]  # fmt: skip
NUMBERS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip

SPELLING = (
    "cat dog sun moon star tree book fish bird milk bread apple house water river stone cloud green blue red white "
    "black happy small large table chair horse mouse sheep tiger lemon honey music paper light night day king queen "
    "ship train clock plant flower garden winter summer spring friend school letter number model cache token disk "
    "memory expert layer hello world earth ocean island bridge"
).split()

CITIES = (
    "Paris London Berlin Rome Madrid Tokyo Oslo Vienna Prague Lisbon Dublin Athens Cairo Lima Moscow Beijing Delhi "
    "Toronto Sydney Boston Chicago Munich Hamburg Milan Geneva Zurich Seoul Bangkok Havana Warsaw"
).split()

WEATHER = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear"]
