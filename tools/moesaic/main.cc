#include "tool_main.h"

int main(int argc, char** argv) { return moesaic::tool::tool_main(argc, argv); }
